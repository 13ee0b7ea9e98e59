"""The page of flags is the one the table would write."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "flags_doc.py"


def test_the_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("flags_doc", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run: python scripts/flags_doc.py"
