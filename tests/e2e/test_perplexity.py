"""The cpu backend's answers against the reference's, by `artesian bench quality` and its own bars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artesian.clients.bench.quality import main

pytestmark = pytest.mark.model


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param(1024, id="1k"),
        pytest.param(4096, id="4k", marks=[pytest.mark.long, pytest.mark.timeout(900)]),
    ],
)
def test_perplexity_divergence_and_agreement_are_within_the_bars(
    smollm2_path: Path, tmp_path: Path, tokens: int
) -> None:
    report = tmp_path / "quality.json"
    main(["--model", str(smollm2_path), "--tokens", str(tokens), "--window", "512", "--json", str(report)])
    result = json.loads(report.read_text())
    assert result["settings"]["tokens"] == tokens
    perplexities = {m["subject"]: m["samples"][0] for m in result["measures"] if m["name"] == "perplexity"}
    assert 3 < perplexities["reference"] < 60  # the model reads: a broken one would be beyond thousands
    values = {bar["name"]: bar["value"] for bar in result["bars"]}
    assert len(values) == 3
    assert abs(values["perplexity against the reference, %"]) < 0.5
    assert values["mean KL, nats"] < 0.005
    assert values["same most likely token, %"] > 96
