"""Key files: created once, and loaded only if private."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvkeep.core.errors import InvalidValue
from kvkeep.store.codecs import generate_key, load_key


def written(path, content: bytes, mode: int = 0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_generated_key_can_be_loaded(tmp_path):
    for umask in (0o000, 0o022, 0o077):
        before = os.umask(umask)
        try:
            generate_key(tmp_path / f"{umask}.key")
        finally:
            os.umask(before)
        assert stat.S_IMODE((tmp_path / f"{umask}.key").stat().st_mode) == 0o600
    keys = {load_key(path) for path in tmp_path.iterdir()}
    assert len(keys) == 3
    assert all(len(key) == 32 for key in keys)


def test_an_existing_key_is_never_overwritten(tmp_path):
    generate_key(tmp_path / "key")
    before = load_key(tmp_path / "key")
    with pytest.raises(InvalidValue, match="there already"):
        generate_key(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidValue, match="there already"):
        generate_key(tmp_path / "link")
    assert load_key(str(tmp_path / "key")) == before
    assert not (tmp_path / "nowhere").exists()


def test_a_missing_directory(tmp_path):
    with pytest.raises(InvalidValue, match="No such file"):
        generate_key(tmp_path / "no" / "key")
    with pytest.raises(InvalidValue, match="No such file"):
        load_key(tmp_path / "key")


def test_a_failed_write_leaves_no_key_file(tmp_path):
    code = """if True:
        import resource, sys
        from kvkeep.store.codecs import generate_key
        from kvkeep.core.errors import InvalidValue
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))  # as a full disk: ten bytes go in
        try:
            generate_key(sys.argv[1])
        except InvalidValue as error:
            assert "cannot be written" in str(error), error
        else:
            sys.exit("a key of ten bytes")
    """
    subprocess.run([sys.executable, "-c", code, tmp_path / "key"], check=True)
    assert not (tmp_path / "key").exists()


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_both_forms_are_one_key(tmp_path, end):
    key = os.urandom(31) + b"\n"  # raw bytes may end in what looks like a line's end
    assert load_key(written(tmp_path / "raw", key)) == key
    assert load_key(written(tmp_path / "hex", key.hex().encode() + end)) == key
    assert load_key(written(tmp_path / "upper", key.hex().upper().encode() + end)) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o644, 0o660])
def test_a_key_file_others_can_access_is_refused(tmp_path, mode):
    path = written(tmp_path / "key", os.urandom(32), mode)
    with pytest.raises(InvalidValue, match=f"{mode:04o}.*chmod 600 {path}"):
        load_key(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_key_file_is_accepted(tmp_path, mode):
    assert len(load_key(written(tmp_path / "key", os.urandom(32), mode))) == 32


@pytest.mark.parametrize(
    "content",
    [b"", os.urandom(31), os.urandom(33), b"a" * 63, b"g" * 64, b"ab" * 33, b"\0" * 10_000],
    ids=["empty", "31", "33", "63 digits", "no digits", "66 digits", "long"],
)
def test_invalid_key_files_are_refused(tmp_path, content):
    with pytest.raises(InvalidValue, match="is no key file"):
        load_key(written(tmp_path / "key", content))


def test_a_directory_is_no_key(tmp_path):
    tmp_path.chmod(0o700)
    with pytest.raises(InvalidValue):
        load_key(tmp_path)


def test_the_key_is_not_in_the_message(tmp_path):
    with pytest.raises(InvalidValue) as raised:
        load_key(written(tmp_path / "key", b"secret-but-too-short"))
    assert "secret-but" not in str(raised.value)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="needs root, to be another")
@pytest.mark.parametrize(
    ("mode", "taken"), [(0o440, True), (0o640, True), (0o644, False), (0o660, False)]
)
def test_a_key_of_roots_may_be_read_by_its_group(mode, taken):
    """As Kubernetes mounts a secret with fsGroup, and systemd passes a credential."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        path = written(Path(folder, "key"), os.urandom(32), mode)
        os.chown(path, 0, 65_533)
        before = os.getegid()
        os.setegid(65_533)
        os.seteuid(65_534)
        try:
            if taken:
                assert len(load_key(path)) == 32
            else:
                with pytest.raises(InvalidValue, match=f"{mode:04o}"):
                    load_key(path)
        finally:
            os.seteuid(0)
            os.setegid(before)
