"""The files for those who cite, report or contribute name what there is."""
import re

import mm3d
from support import ROOT

FILES = {path.name: path.read_text("utf-8") for path in (ROOT / ".github").rglob("*")
         if path.suffix in (".md", ".cff")}


def test_the_version_is_that_of_the_package():
    assert f"\nversion: {mm3d.__version__}\n" in FILES["CITATION.cff"]
    assert f"version = {{{mm3d.__version__}}}" in FILES["CITATION.md"]
    assert re.search(r"^## (\S+)", FILES["CHANGELOG.md"], re.M)[1] == mm3d.__version__


def test_the_paper_is_cited_alike():
    """Its authors in the order of the paper, its title and its number."""
    given = re.findall(r"given-names: (\w+)\n +family-names: (\w+)", FILES["CITATION.cff"])
    assert " and ".join(map(" ".join, given)) in FILES["CITATION.md"] and len(given) == 4
    title = "Maximizing Parallelism in Distributed Training for Huge Neural Networks"
    for name in ("CITATION.cff", "CITATION.md"):
        assert title in FILES[name] and FILES[name].count("2105.14450") >= 2
    assert "2105.14450" in (ROOT / "README.rst").read_text()


def test_links_lead_somewhere():
    found = [(name, target) for name, text in FILES.items()
             for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    home = {path.name: path.parent for path in (ROOT / ".github").rglob("*")}
    assert len(found) > 5
    assert [one for one in found if not (home[one[0]] / one[1]).exists()] == []
