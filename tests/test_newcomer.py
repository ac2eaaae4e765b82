"""Whether a start is of use to a run, by what that run has written down."""

from pathlib import Path

import pytest

from mingpt.lease import Lease, Run, record_run
from mingpt.newcomer import check, is_as_recorded
from mingpt.storage import LocalStore

RUN = Run("0123456789abcdef", 1, "")
SETTINGS = {"log.interval": 10, "seed": 1}
VERSIONS = {"mingpt": "1, code a", "torch": "2"}


def recorded(folder: Path) -> tuple[Path, LocalStore]:
    out_dir, store = folder / "out", LocalStore(folder / "store")
    record_run(RUN, out_dir, store, {"name": "x", "config": SETTINGS, "versions": VERSIONS})
    return out_dir, store


@pytest.mark.parametrize(
    ("changed", "alike"), [({}, True), ({"log.interval": 2}, False), ({"mingpt": "1, code b"}, False)]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_start_is_compared_with_what_the_run_wrote_down(
    tmp_path: Path, changed: dict[str, object], alike: bool, elsewhere: bool
) -> None:
    out_dir, store = recorded(tmp_path)
    if elsewhere:
        out_dir = tmp_path / "another node's"
    assert is_as_recorded(out_dir, store, {**SETTINGS, **VERSIONS, **changed}) == alike
    assert not is_as_recorded(tmp_path / "none", LocalStore(tmp_path / "nothing"), SETTINGS), "of no run"


def test_a_start_that_is_not_like_a_run_stays_outside_while_that_is_alive(tmp_path: Path) -> None:
    out_dir, store = recorded(tmp_path)
    other = {**SETTINGS, **VERSIONS, "log.interval": 2}
    check("x", out_dir, store, SETTINGS, "auto", other)  # nobody trains: an operational setting may change
    lease = Lease(store, 2)
    lease.take()
    try:
        check("x", out_dir, store, SETTINGS, "auto", {**SETTINGS, **VERSIONS})
        with pytest.raises(ValueError, match="x is being trained, and this start is not like it: log.interval"):
            check("x", out_dir, store, SETTINGS, "auto", other)
    finally:
        lease.release()
