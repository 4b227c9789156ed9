"""Cold means cold: what the kernel says about a file's pages."""

import os
import sys
from pathlib import Path

import pytest

from tunecast.calibrate.bench.page_cache import (
    SCRATCH_VARIABLE,
    drop_from_cache,
    filesystem_of,
    resident_frac,
    scratch_root,
)

MOUNTS = """\
/dev/root / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
tmpfs /tmp tmpfs rw 0 0
/dev/sdb /tmp/inner xfs rw 0 0
"""


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20))
    return path


def test_a_file_just_written_is_resident(written):
    assert resident_frac(written) in (1.0, None)


def test_a_dropped_file_is_not(written):
    if filesystem_of(written) in ("tmpfs", "ramfs", None) or resident_frac(written) is None:
        pytest.skip("no disk with a page cache we can look into here")
    drop_from_cache(written)
    assert resident_frac(written) == 0.0


def test_unknown_where_the_kernel_cannot_tell(written, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert resident_frac(written) is None


def test_looking_fetches_nothing(written):
    """A second look finds no more than the first, however many there are."""
    drop_from_cache(written)
    looks = {resident_frac(written) for _ in range(20)}
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("path", "kind"), [("/home/x", "ext4"), ("/tmp/x", "tmpfs"), ("/tmp/inner/x", "xfs"), ("/tmpfoo", "ext4")]
)
def test_the_deepest_mount_decides(tmp_path, path, kind):
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert filesystem_of(Path(path), mounts) == kind


def test_no_mount_table(tmp_path):
    assert filesystem_of(tmp_path, tmp_path / "none") is None


def test_the_users_scratch_folder_wins(tmp_path, monkeypatch):
    monkeypatch.setenv(SCRATCH_VARIABLE, str(tmp_path))
    assert scratch_root() == tmp_path


def test_a_disk_without_room_is_unsupported(monkeypatch):
    pytest.importorskip("torch")
    from collections import namedtuple

    from tunecast.calibrate.bench import files
    from tunecast.calibrate.devices.cpu import CpuBackend
    from tunecast.calibrate.devices.protocol import TrialSpec

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage(10, 9, 1))
    for bench, params in (
        ("disk", {"bytes": 100, "cold": True, "direction": "read"}),
        ("load", {"bytes": 100, "quantize": False}),
        ("checkpoint", {"bytes": 100}),
    ):
        run = {"disk": files.run_disk, "load": files.run_load, "checkpoint": files.run_checkpoint}[bench]
        result = run(TrialSpec(bench=bench, params=params, repeats=1, warmup=0), CpuBackend())
        assert result.outcome == "unsupported"
        assert "free" in result.message
