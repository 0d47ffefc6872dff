"""Kernels for instructions that this CPU lacks: with these instructions in software."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from realrl.cpu import loader
from tests.cpu import test_operations as operations_tests

pytestmark = pytest.mark.skipif(loader.why_not() is not None, reason=f"no kernels: {loader.why_not()}")

_FOLDER = Path(__file__).parent
_VECTORS, _TILES = (f"-include {shlex.quote(str(_FOLDER / name))}_in_software.h" for name in ("avx512", "tiles"))
VARIANTS = {
    "avx512f": _VECTORS,
    "avx512_bf16": f"-DREALRL_BF16 {_VECTORS}",
    "amx_bf16": f"-DREALRL_BF16 {_VECTORS} {_TILES} -DREALRL_TILES",
}


def lacking() -> list[str]:
    if loader.why_not() is not None:
        return []
    return [name for name in VARIANTS if name not in loader._features()]


@pytest.fixture(autouse=True, scope="module", params=lacking())
def instructions(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
        patch.setenv("CXX", f"{compiler} {VARIANTS[request.param]}")
        library = loader._open(loader.build(tmp_path_factory.mktemp("kernels"), loader._AVX2))
        operations_tests.use(library, patch)
        yield


@pytest.fixture(autouse=True)
def n_threads():
    with operations_tests.threads(2):
        yield


test_products = operations_tests.test_products
test_a_norm_within_a_product_is_that_before_it = operations_tests.test_a_norm_within_a_product_is_that_before_it
test_a_row_does_not_depend_on_its_company = operations_tests.test_a_row_does_not_depend_on_its_company
test_strided_inputs = operations_tests.test_strided_inputs
test_what_is_not_finite_stays_so = operations_tests.test_what_is_not_finite_stays_so
test_rms_norm = operations_tests.test_rms_norm
test_attention = operations_tests.test_attention
test_attention_that_is_not_finite_stays_so = operations_tests.test_attention_that_is_not_finite_stays_so
test_layers_together_are_their_parts = operations_tests.test_layers_together_are_their_parts
test_activations_of_everything = operations_tests.test_activations_of_everything
test_sampling = operations_tests.test_sampling
