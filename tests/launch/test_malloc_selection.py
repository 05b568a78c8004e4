"""Choice of the workers' memory allocator; settings of the user are kept."""

import platform

import pytest

from lockstep._errors import OptionError
from lockstep.launch.worker_environment import choose_allocator, glibc_version, library_folders
from tests.launch.launching import program, run

NEW, OLD = (2, 36), (2, 34)


@pytest.fixture
def folder(tmp_path):
    def with_libraries(*names):
        for name in names:
            (tmp_path / name).touch()
        return [tmp_path]

    return with_libraries


def test_the_fastest_that_is_there_is_chosen(folder):
    assert choose_allocator("auto", {}, folder(), OLD).variables == {}
    assert choose_allocator("auto", {}, folder(), None).variables == {}
    assert choose_allocator("auto", {}, folder(), NEW).variables == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    jemalloc = choose_allocator("auto", {}, folder("libjemalloc.so.2"), NEW)
    assert jemalloc.variables["LD_PRELOAD"].endswith("/libjemalloc.so.2")
    assert "retain:true" in jemalloc.variables["MALLOC_CONF"]
    tcmalloc = choose_allocator("auto", {}, folder("libtcmalloc_minimal.so.4"), NEW)
    assert tcmalloc.variables["LD_PRELOAD"].endswith("/libtcmalloc_minimal.so.4")
    assert "GLIBC_TUNABLES" not in tcmalloc.variables
    assert tcmalloc.name.startswith("tcmalloc (")


def test_a_library_that_cannot_be_preloaded_is_passed_over(folder, tmp_path):
    folder("libjemalloc.so")[0].joinpath("libjemalloc.so").unlink()
    (tmp_path / "libjemalloc.so.1").symlink_to(tmp_path / "gone")
    with_space = tmp_path / "with space"
    with_space.mkdir()
    (with_space / "libjemalloc.so.2").touch()
    assert choose_allocator("auto", {}, [tmp_path, with_space], OLD).variables == {}


def test_one_can_be_asked_for(folder):
    both = folder("libjemalloc.so.2", "libtcmalloc.so.4")
    assert "jemalloc" in choose_allocator("jemalloc", {}, both, NEW).variables["LD_PRELOAD"]
    assert choose_allocator("system", {}, both, NEW).variables == {"LOCKSTEP_KEEP_MEMORY": "0"}
    with pytest.raises(
        OptionError, match=r"--allocator tcmalloc: no libtcmalloc_minimal.so\* or .*apt install libtcmalloc"
    ):
        choose_allocator("tcmalloc", {}, [], NEW)


def test_what_the_user_has_set_stays(folder):
    own = {"LD_PRELOAD": "/opt/own.so", "MALLOC_CONF": "narenas:2", "GLIBC_TUNABLES": "glibc.malloc.check=3"}
    assert choose_allocator("auto", own, [], NEW).variables["GLIBC_TUNABLES"] == (
        "glibc.malloc.check=3:glibc.malloc.hugetlb=1"
    )
    jemalloc = choose_allocator("auto", own, folder("libjemalloc.so.2"), NEW).variables
    assert jemalloc["LD_PRELOAD"].endswith("/libjemalloc.so.2:/opt/own.so")
    assert jemalloc["MALLOC_CONF"].endswith(",narenas:2")
    assert choose_allocator("auto", {"LD_PRELOAD": "/opt/libmimalloc.so"}, folder(), NEW).variables == {}
    assert choose_allocator("auto", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}, [], NEW).variables == {}
    quiet = {"TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD": "5"}
    assert choose_allocator("auto", quiet, folder("libtcmalloc.so.4"), NEW).variables.items() >= quiet.items()


def test_programs_on_gpus_are_left_alone(folder):
    assert choose_allocator("auto", {}, folder("libtcmalloc.so.4"), NEW, uses_gpus=True).variables == {}
    assert choose_allocator("tcmalloc", {}, folder("libtcmalloc.so.4"), NEW, uses_gpus=True).variables


def test_libraries_are_looked_for_where_the_user_says_first(tmp_path):
    folders = library_folders({"LD_LIBRARY_PATH": f"{tmp_path}:/no/such/folder:"})
    assert folders[0] == tmp_path
    assert all(folder.is_dir() for folder in folders)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_workers_start_with_it(tmp_path):
    names = "GLIBC_TUNABLES", "LD_PRELOAD", "LOCKSTEP_KEEP_MEMORY"
    code = f"print([os.environ.get(name) for name in {names}])"
    version = glibc_version()
    assert version is not None
    done = run("--allocator", "system", program(tmp_path, code), GLIBC_TUNABLES="", LD_PRELOAD="")
    assert done.stdout == "[worker 0] ['', '', '0']\n"
    assert "allocator: that of the system" in done.stderr
    done = run("--allocator", "auto", program(tmp_path, code), GLIBC_TUNABLES="", LD_PRELOAD="")
    chosen = choose_allocator("auto", {}, library_folders({}), version)
    assert f"allocator: {chosen.name}." in done.stderr
    assert done.stdout == f"[worker 0] {[chosen.variables.get(name, '') for name in names[:2]] + [None]}\n"
