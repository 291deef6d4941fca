"""The documentation site builds without a warning, and its reference has every public name."""

import html
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = ["vecenv", "vecenv.ingraph", "ppo"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.build
@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name(site, module):
    package = module.partition(".")[0]
    page = (site / f"api-{package}" / "index.html").read_text()
    for name in sorted(set(importlib.import_module(module).__all__) - {"__version__"}):
        assert re.search(rf'<h3 id="{package}\.[\w.]*\b{name}"', page), name


@pytest.mark.build
def test_the_site_loads_nothing_from_other_servers(site):
    pages = [*site.rglob("*.html")]
    assert len(pages) > 20
    for page in pages:
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not [address for address in loaded if not address.startswith("https://squidfunk.github.io")], page


@pytest.mark.build
def test_the_site_shows_the_code_of_the_examples(site):
    """The site cannot link to files outside of docs/, so a page includes them."""
    shown = html.unescape(re.sub("<[^>]+>", "", (site / "examples" / "index.html").read_text()))
    for file in ("vecenv/robots/quadruped.py", "vecenv/robots/quadruped.xml", "examples/a2c.py"):
        assert (ROOT / file).read_text().strip() in shown, file


def test_the_page_of_examples_has_every_example():
    page = (ROOT / "docs" / "examples.md").read_text()
    found = {
        path for pair in re.findall(r'^--8<-- "(.+)"$|`(examples/\S+)`', page, flags=re.MULTILINE) for path in pair
    }
    files = {
        f"examples/{file.name}"
        for file in (ROOT / "examples").iterdir()
        if re.search(r"[^_]\.(py|xml|ipynb)$", file.name)
    }
    assert files <= found and len(files) >= 10


def test_every_page_is_in_the_table_of_contents():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, f"link {page.name} in docs/index.md"


def test_the_reference_has_every_adapter():
    page = (ROOT / "docs" / "api-vecenv.md").read_text()
    for file in (ROOT / "vecenv" / "adapters").glob("[!_]*.py"):
        if file.stem != "joint_env":  # a part of vecenv.adapters.pettingzoo
            assert f"`vecenv.adapters.{file.stem}`" in page, f"add vecenv.adapters.{file.stem} to docs/api-vecenv.md"
