"""The fixture of the kubelet that statements about kubelets share."""

from collections.abc import Iterator

import pytest

from tests.worlds import kubelet_nodes


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Iterator[kubelet_nodes.Node]:
    """Yield a kubelet of the kind in the parameter."""
    with kubelet_nodes.started(request.param) as node:
        yield node
