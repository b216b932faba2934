"""On a real card: the prediction beside the card's own statistics. Skipped, with a reason, where there is none."""
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))


@pytest.fixture(scope="module")
def card():
    import measure_card
    return measure_card.this_card()


@pytest.mark.parametrize("name", ["full", "chunked", "lora"])
def test_predicted_measured_and_tried_as_a_limit(name, card):
    """The same step on the card: allocated by phase, and the predicted reserved bytes as a cap that just suffices."""
    import measure_card
    rows = measure_card.compare(name, card)
    assert not [row for row in rows if row["phase"] == "failed"], rows
    for row in rows:
        if "measured_allocated" in row:
            assert row["predicted_allocated"] == pytest.approx(row["measured_allocated"], rel=0.02), row
    notes = {row["phase"]: row.get("note") for row in rows}
    assert notes["cap +2 %"] == "ran"
    assert notes["cap -5 %"] == "ran out"
