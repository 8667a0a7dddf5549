"""The contract suite on the cluster of ``KUBECONFIG``, with CLOUDTRAIN_KUBERNETES=1; see worlds/kubernetes/real.py.

Without that variable this module has no test. CLOUDTRAIN_KUBERNETES_IMAGE is an image of its nodes with Python and
torch. ``--basetemp`` is a folder that the nodes have at the same path.
"""

from __future__ import annotations

import os

import pytest
from worlds.kubernetes.real import RealCluster

from cloudtrain.testing.contract import ProviderContract
from cloudtrain.testing.platform import FakePlatform

if os.environ.get("CLOUDTRAIN_KUBERNETES") == "1":

    class TestRealCluster(ProviderContract):
        @pytest.fixture(scope="class")
        @classmethod
        def world(cls, tmp_path_factory: pytest.TempPathFactory) -> FakePlatform:
            return RealCluster(tmp_path_factory.mktemp("world"))
