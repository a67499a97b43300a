"""A kubelet that all statements about kubelets share."""

from collections.abc import Iterator

import pytest

from tests.worlds import kubelet_nodes


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Iterator[kubelet_nodes.Node]:
    """Give the kubelet of this kind."""
    with kubelet_nodes.started(request.param) as node:
        yield node
