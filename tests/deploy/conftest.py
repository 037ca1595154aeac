"""Tests of what is deployed need Helm; where it cannot be had, they say so."""

from __future__ import annotations

import functools

import pytest

from deploy import tools


@functools.cache
def _why_not() -> str:
    try:
        tools.helm(3)
        tools.helm(4)
        for version in tools.KUBE_VERSIONS:
            tools.schemas(version)
    except tools.Unavailable as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def helm() -> None:
    """Helm 3 and 4, and Kubernetes' schemas."""
    if why := _why_not():
        pytest.skip(why)
