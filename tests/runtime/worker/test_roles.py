"""Parameters of several calls beside their home, and what each leaves when it goes."""

from __future__ import annotations

import pytest
import torch

from realrl.experiment.declaration import Role
from realrl.runtime.worker.roles import HostedRole


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_the_home_leave_the_memory_of_an_ended_call_with_it(dim: int) -> None:
    whole = torch.arange(48.0).view(6, 8)
    home = whole.narrow(dim, 2, 4)
    part, values = home.narrow(dim, 1, 2), home.clone()
    hosted = HostedRole(role=Role(trainable=True), models={}, home=None, interfaces={}, calls=())
    hosted.receive("gen", {"weight": whole}, [home])
    hosted.receive("inf", {"weight": part}, [])
    hosted.send_home("gen")
    assert home.untyped_storage().nbytes() == home.nbytes
    assert part.untyped_storage().data_ptr() == home.untyped_storage().data_ptr()
    assert torch.equal(home, values)
    assert torch.equal(part, values.narrow(dim, 1, 2))
