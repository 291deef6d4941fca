"""The version names the commit of a clone, is that of the build in a wheel or an sdist, and never claims a release."""

import shutil
import subprocess
import sys

import pytest

import vecenv
from vecenv.version import RELEASE, version_of

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def git(folder, *words):
    identity = ["-c", "user.name=me", "-c", "user.email=me@example.com", "-c", "commit.gpgsign=false"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path):
    """Returns a repository with one commit and no tags."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file").write_text("one")
    git(folder, "add", "file")
    git(folder, "commit", "-q", "-m", "one")
    return folder


@needs_git
def test_a_clone_without_tags_is_named_by_its_commit(clone, monkeypatch):
    expected = f"{RELEASE}+g{git(clone, 'rev-parse', '--short=10', 'HEAD')}"
    assert version_of(clone) == expected
    monkeypatch.setenv("GIT_DIR", "/elsewhere/.git")  # as in a git hook
    assert version_of(clone) == expected


@needs_git
def test_a_changed_file_makes_a_clone_dirty(clone):
    clean = version_of(clone)
    (clone / "file").write_text("two")
    assert version_of(clone) == f"{clean}.dirty"


@needs_git
def test_only_the_tagged_commit_is_the_release(clone):
    git(clone, "tag", f"v{RELEASE}")
    assert version_of(clone) == RELEASE
    (clone / "file").write_text("two")
    assert version_of(clone).endswith(".dirty")
    git(clone, "commit", "-q", "-a", "-m", "two")
    assert version_of(clone) == f"{RELEASE}+g{git(clone, 'rev-parse', '--short=10', 'HEAD')}"


@needs_git
def test_a_copy_inside_another_projects_clone_does_not_name_that_projects_commit(clone):
    (clone / "site-packages").mkdir()
    assert version_of(clone / "site-packages") == f"{RELEASE}+unknown"


def test_a_clone_on_a_machine_without_git_is_not_a_release(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    metadata_of(tmp_path, f"{RELEASE}+g0123456789")  # of an earlier editable install
    monkeypatch.setenv("PATH", "")
    assert version_of(tmp_path) == f"{RELEASE}+unknown"


@pytest.mark.parametrize("version", [RELEASE, f"{RELEASE}+g0123456789.dirty"])
def test_an_installed_copy_has_the_version_of_its_build(tmp_path, version):
    metadata_of(tmp_path, version)
    assert version_of(tmp_path) == version


def test_metadata_that_an_older_release_left_behind_are_ignored(tmp_path):
    metadata_of(tmp_path, "0.0.7")
    assert version_of(tmp_path) == f"{RELEASE}+unknown"


def metadata_of(folder, version):
    info = folder / f"vecenv_ppo-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vecenv-ppo\nVersion: {version}\n")


def test_importing_vecenv_does_not_call_git():
    code = "import sys, vecenv; assert 'vecenv.version' not in sys.modules; print(vecenv.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == vecenv.__version__ and vecenv.__version__.startswith(RELEASE)
    with pytest.raises(AttributeError, match="module 'vecenv' has no attribute '__vers__'"):
        vecenv.__vers__  # noqa: B018
