"""docs/kubernetes.md: the values it shows are taken, and its numbers are those of the chart."""

from __future__ import annotations

import re

import pytest
import yaml

from deploy.lock import ROOT
from tests.deploy.cases import PLAIN, Values
from tests.deploy.objects import container_of, pod_of, render

GUIDE = (ROOT / "docs/kubernetes.md").read_text()
EXAMPLES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)]


def _over(base: Values, more: Values) -> Values:
    """As Helm merges files of values."""
    both = {key: _over(base[key], value) for key, value in more.items() if isinstance(base.get(key), dict)}
    return {**base, **more, **both}


@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize("example", EXAMPLES, ids=[next(iter(one)) + f" {n}" for n, one in enumerate(EXAMPLES)])
def test_examples_render(example: Values) -> None:
    assert render(_over(PLAIN, example)).workload("router")


@pytest.mark.usefixtures("helm")
def test_grace_periods_are_what_the_guide_says() -> None:
    vllm = render(_over(PLAIN, {"pools": {"common": {"engine": "vllm"}}}))
    ours = render(PLAIN)
    told = [int(seconds) for seconds in re.findall(r"\| (\d+) s \|$", GUIDE, re.MULTILINE)]
    assert told == [
        pod_of(one)["terminationGracePeriodSeconds"]
        for one in (
            ours.workload("router"),
            ours.workload("decode"),
            vllm.workload("prefill"),
            vllm.workload("decode"),
        )
    ]
    assert container_of(vllm.workload("prefill"))["lifecycle"]["preStop"] == {"sleep": {"seconds": 35}}
