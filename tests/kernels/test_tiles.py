"""What is written for the matrix unit, on CPUs without one: with its instructions in software."""

import os
import shutil
from pathlib import Path

import pytest

from realrl import kernels
from realrl.kernels import loader
from tests.kernels import test_operations as operations_tests

_SOFTWARE = Path(__file__).parent / "tiles_in_software.h"


def why_not() -> str | None:
    if reason := kernels.why_not():
        return f"no kernels: {reason}"
    features = loader._features()
    if "amx_bf16" in features:
        return "this CPU has a matrix unit, which the tests of the operations use"
    return None if "avx512_bf16" in features else "this CPU has no bfloat16 instructions"


pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(autouse=True, scope="module")
def instructions(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        patch.setenv("CXX", f"{compiler} -include {_SOFTWARE} -DREALRL_TILES")
        library = loader._open(loader.build(tmp_path_factory.mktemp("kernels"), loader._features()))
        operations_tests.use(library, patch)
        yield


n_threads = operations_tests.n_threads
test_products = operations_tests.test_products
test_a_norm_within_a_product_is_that_before_it = operations_tests.test_a_norm_within_a_product_is_that_before_it
test_a_row_does_not_depend_on_its_company = operations_tests.test_a_row_does_not_depend_on_its_company
test_strided_inputs = operations_tests.test_strided_inputs
test_what_is_not_finite_stays_so = operations_tests.test_what_is_not_finite_stays_so
test_a_block_in_one_call_is_its_parts = operations_tests.test_a_block_in_one_call_is_its_parts
