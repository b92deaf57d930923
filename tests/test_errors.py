"""The exception tree is what its docstring says."""

from __future__ import annotations

import inspect
import re

import tileflux.errors as errors


def test_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"\+- (\w+)", errors.__doc__)) | {"TilefluxError"}
    real = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert drawn == real == set(errors.__all__)
    for name in real:
        assert issubclass(getattr(errors, name), errors.TilefluxError)


def test_a_missing_transport_says_how_to_mend_it() -> None:
    error = errors.TransportUnavailable("no GPU", "plug one in")
    assert error.fix == "plug one in" and str(error) == "no GPU. To fix: plug one in"


def test_a_timeout_names_the_culprit_only_when_it_is_another() -> None:
    def make(peer: int) -> str:
        return str(
            errors.PeerTimeout(
                op="all_gather", rank=0, peer=peer, waited_for=1, flag="mailbox.data", wanted=2, seen=1, seconds=2.0
            )
        )

    assert make(1) == (
        "all_gather: rank 0 waited 2.0 s for rank 1: flag mailbox.data should have reached 2 but stands at 1"
    )
    assert make(3).endswith("rank 1 was itself waiting, and the first rank missing is rank 3")
