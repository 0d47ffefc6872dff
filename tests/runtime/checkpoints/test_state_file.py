"""Nested state survives the way to a file and back."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realrl.errors import AssetError, TransportError
from realrl.runtime.checkpoints.state_file import StateFile, decode_state, encode_state, load_state, save_state


def test_round_trip(tmp_path: Path) -> None:
    state = {
        "step": 3,
        "kl": {"coef": 0.1, "name": "adaptive", "on": True, "none": None},
        "moments": [torch.arange(6).reshape(2, 3), {"scalar": torch.tensor(2.5, dtype=torch.float64)}],
        "half": torch.ones(3, dtype=torch.bfloat16),
    }
    save_state(tmp_path / "s.safetensors", state)
    back = load_state(tmp_path / "s.safetensors")
    assert back["step"] == 3
    assert back["kl"] == state["kl"]
    assert torch.equal(back["moments"][0], state["moments"][0])
    assert back["moments"][1]["scalar"].item() == 2.5
    assert back["moments"][1]["scalar"].dtype is torch.float64
    assert torch.equal(back["half"], state["half"])


def test_shared_and_strided_tensors_are_kept_by_value(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    save_state(tmp_path / "s.safetensors", {"a": base, "b": base.t(), "c": base[1]})
    back = load_state(tmp_path / "s.safetensors")
    assert torch.equal(back["b"], base.t())
    assert torch.equal(back["c"], base[1])


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="state 'a/b' holds a set"):
        save_state(tmp_path / "s.safetensors", {"a": {"b": {1, 2}}})


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    save_state(path, {"x": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(AssetError, match=r"s\.safetensors cannot be read"):
        load_state(path)
    with pytest.raises(AssetError, match=r"gone\.safetensors cannot be read"):
        load_state(tmp_path / "gone.safetensors")


def test_messages_hold_the_same() -> None:
    state = {"version": 2, "norm": {"mean": 0.1 + 0.2, "history": torch.arange(5)}, "empty": {}}
    back = decode_state(encode_state(state))
    assert back.keys() == state.keys()
    assert (back["version"], back["norm"]["mean"], back["empty"]) == (2, 0.1 + 0.2, {})
    assert torch.equal(back["norm"]["history"], torch.arange(5))


def test_a_torn_message_is_named() -> None:
    message = encode_state({"x": torch.ones(10)})
    for torn in (message[:-1], message[:5], b""):
        with pytest.raises(TransportError, match=f"a message of {len(torn)} bytes was expected to hold state"):
            decode_state(torn)


def test_parts_of_a_file_are_read_alone(tmp_path: Path) -> None:
    path, whole = tmp_path / "s.safetensors", torch.arange(12.0).reshape(3, 4)
    save_state(path, {"n": 3, "scale": {"x": torch.tensor(2.0)}, "parameters": {"w": {"m": whole, "step": 5}}})
    with StateFile(path) as file:
        assert file.entries("parameters", "w") == {"m": True, "step": 5}
        assert torch.equal(file.read(("parameters", "w", "m"), ((1, 3), (0, 2))), whole[1:3, 0:2])
        assert file.restore("n") == 3
        assert file.without("parameters") == {"n": 3, "scale": {"x": torch.tensor(2.0)}}
        with pytest.raises(AssetError, match=r"s\.safetensors cannot be read: 'v'"):
            file.entries("parameters", "v")


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool],
)
def test_every_kind_of_number_survives_and_the_library_reads_it_too(tmp_path: Path, dtype: torch.dtype) -> None:
    path, tensor = tmp_path / "s.safetensors", torch.tensor([[0, 1], [1, 3]]).to(dtype)
    save_state(path, {"x": tensor, "empty": tensor[:0]})
    for back in (load_state(path), load_file(path)):
        assert back["x"].dtype is dtype
        assert torch.equal(back["x"], tensor)
        assert back["empty"].shape == (0, 2)


def test_a_full_disk_is_named() -> None:
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_state(Path("/dev/full"), {"x": torch.ones(1 << 20)})
    assert caught.value.filename == "/dev/full"
