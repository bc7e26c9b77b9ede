from __future__ import annotations

from pathlib import Path

from triptych.base.project import links, with_absolute_links

ROOT = Path(__file__).parents[3]
URL = "https://example.org/triptych"


def test_the_package_pages_links_lead_to_files_of_the_project_and_pictures_to_their_bytes():
    page = with_absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), URL)
    assert f"]({URL}/raw/main/docs/architecture.svg)" in page
    assert f"[API]({URL}/blob/main/docs/api.md)" in page
    assert "](docs/" not in page
    assert with_absolute_links("[a](#b) [c](https://d.e) [f](/g)", URL) == "[a](#b) [c](https://d.e) [f](/g)"


def test_without_an_address_links_stay_as_they_are_and_there_are_none_by_role():
    assert with_absolute_links("[a](docs/a.md)", "") == "[a](docs/a.md)"
    assert links("") == {}


def test_every_document_that_has_a_role_is_there():
    prefix = f"{URL}/blob/main/"
    assert all((ROOT / link.removeprefix(prefix)).is_file() for link in links(URL).values())
