"""Attributes of a library that are replaced for the time of a block."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from realrl.engine.backends.replaced import replaced


class Library:
    def answer(self) -> str:
        return "the library's"


def test_an_owner_is_as_it_was_after_the_block() -> None:
    owner = SimpleNamespace(a=1, b=2)
    with replaced(owner, a=10):
        assert (owner.a, owner.b) == (10, 2)
    assert vars(owner) == {"a": 1, "b": 2}


def test_what_an_object_inherits_it_inherits_again() -> None:
    owner = Library()
    with replaced(owner, answer=lambda: "ours"):
        assert owner.answer() == "ours"
    assert owner.answer() == "the library's"
    assert not vars(owner)


def test_an_error_in_the_block_leaves_nothing_behind() -> None:
    owner = SimpleNamespace(a=1)
    with pytest.raises(KeyError), replaced(owner, a=2):
        raise KeyError
    assert owner.a == 1


def test_blocks_may_be_nested() -> None:
    owner = SimpleNamespace(a=1)
    with replaced(owner, a=2):
        with replaced(owner, a=3):
            assert owner.a == 3
        assert owner.a == 2
    assert owner.a == 1


def test_an_attribute_that_a_library_no_longer_has_is_noticed() -> None:
    owner = SimpleNamespace(a=1)
    with pytest.raises(AttributeError), replaced(owner, a=2, renamed=None):
        pass
    assert owner.a == 1
