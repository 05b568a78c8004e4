"""With a key, only checkpoints that were written with it are read; without one, all are."""

import hashlib
import hmac
import json
import shutil

import pytest

from lockstep import CheckpointError, OptionError, cli
from lockstep.checkpoint.manifest import KEY_FILE, signing_key
from lockstep.checkpoint.store import CheckpointStore

from .cases import assert_equal, small, store_in
from .test_damage import fields_of, say


@pytest.fixture
def use_key(tmp_path, monkeypatch):
    """Has the process sign with a key; None: with none."""

    def use(key):
        if key is None:
            monkeypatch.delenv(KEY_FILE, raising=False)
            return
        (tmp_path / "key").write_text(f"{key}\n")
        monkeypatch.setenv(KEY_FILE, str(tmp_path / "key"))

    return use


OURS, OTHER = "0123456789abcdef", "fedcba9876543210"


@pytest.mark.parametrize(
    ("written", "read", "says"),
    [
        (None, None, None),
        (OURS, OURS, None),
        (OURS, None, None),
        (None, OURS, f"is not signed, and {KEY_FILE} is set. Fix: if you trust it, run 'lockstep checkpoint sign "),
        (OTHER, OURS, f"is signed with another key than that of {KEY_FILE}, or was changed."),
    ],
)
def test_who_can_read_what(written, read, says, use_key, tmp_path):
    lines = []
    use_key(read)
    store_in(tmp_path / "run", 7).close()
    use_key(written)
    store_in(tmp_path / "run", 8).close()
    use_key(read)
    store = CheckpointStore(tmp_path / "run", log=lines.append)
    loaded = store.newest()
    assert loaded.step == (8 if says is None else 7)
    assert_equal(loaded, small(loaded.step))
    assert [says in line for line in lines] == ([] if says is None else [True])
    assert len(store.verify(store.paths()[-1])) == len(lines)


def test_a_changed_manifest_with_a_right_checksum_is_refused(use_key, tmp_path):
    use_key(OURS)
    store = store_in(tmp_path / "run", 7)
    (path,) = store.paths()
    fields = fields_of(path)
    say(path, fields)
    store.read(path)
    for changed in (
        fields | {"facts": fields["facts"] | {"epoch": 3}},
        fields | {"hmac": "0" * 64},
        {name: value for name, value in fields.items() if name != "hmac"},
        {"hmac": fields["hmac"]} | {name: value for name, value in fields.items() if name != "hmac"},
    ):
        say(path, changed)
        with pytest.raises(CheckpointError, match=r"is signed with another key|is not signed|is foreign"):
            store.read(path)


def test_the_signature_is_an_hmac_of_what_precedes_it(use_key, tmp_path):
    use_key(OURS)
    (path,) = store_in(tmp_path / "run", 7).paths()
    content = (path / "manifest.json").read_bytes()
    head, _, _ = content.partition(b'"hmac": ')
    assert json.loads(content)["hmac"] == hmac.new(OURS.encode(), head, hashlib.sha256).hexdigest()


def test_verify_and_sign_know_the_key(use_key, tmp_path, capsys):
    folder = str(tmp_path / "run")
    use_key(None)
    store_in(folder, 7, 8).close()
    assert cli.main(["checkpoint", "sign", folder]) == 2
    assert f"{KEY_FILE} is not set" in capsys.readouterr().err
    use_key(OURS)
    assert cli.main(["checkpoint", "verify", folder]) == 1
    printed = capsys.readouterr().out
    assert printed.count("is not signed") == printed.count("intact, but not signed with the key") == 2
    assert "damaged" not in printed
    assert cli.main(["checkpoint", "sign", folder]) == 0
    assert cli.main(["checkpoint", "verify", folder]) == 0
    assert capsys.readouterr().out.endswith(
        "step-000000007: good, and signed with the key\nstep-000000008: good, and signed with the key\n"
    )
    assert_equal(CheckpointStore(folder).newest(), small(8))
    use_key(None)
    assert cli.main(["checkpoint", "verify", folder]) == 0


def test_a_checkpoint_that_a_job_removes_meanwhile_is_left_out(use_key, tmp_path, capsys, monkeypatch):
    use_key(None)
    store = store_in(tmp_path / "run", 7, 8)
    oldest, newest = store.paths()
    use_key(OURS)
    monkeypatch.setattr(
        "lockstep.tools.checkpoints.checkpoints_of", lambda _: shutil.rmtree(oldest) or [oldest, newest]
    )
    assert cli.main(["checkpoint", "sign", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{newest.name}: signed\n"


def test_a_damaged_checkpoint_is_not_signed(use_key, tmp_path):
    use_key(None)
    (path,) = store_in(tmp_path / "run", 7).paths()
    (path / "arrays.npz").write_bytes(bytes((path / "arrays.npz").stat().st_size))
    use_key(OURS)
    assert cli.main(["checkpoint", "sign", str(tmp_path / "run")]) == 2
    assert "hmac" not in fields_of(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("short", "expected a key of at least 16 bytes, got 5. Fix: openssl rand"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_key_that_cannot_be_used_is_an_error_before_anything_is_written(content, says, tmp_path):
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OptionError, match=f"{KEY_FILE}: {path}: {says}"):
        signing_key({KEY_FILE: str(path)})
    assert signing_key({}) is None
    assert signing_key({KEY_FILE: ""}) is None
