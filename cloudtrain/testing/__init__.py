"""Two things for tests: a kit for whoever submits jobs from code of their own, and the contract suite of providers.

The kit is a plugin of pytest that comes with the package (docs/testing.md):

* `cloudtrain.testing.plugin`: its fixtures ``fake_cloud``, ``cloudtrain_store``, ``cloudtrain_snapshot`` and
  ``cloudtrain_offline``.
* `cloudtrain.testing.fake_cloud`: what takes a platform's place; `scripted` and `locally` are what its jobs do.
* `cloudtrain.testing.places`, `memory`: where stores and settings then are; `network`: no way out of this machine.
* `cloudtrain.testing.requests`: assertions on a planned request, golden files of plans.

The contract suite is for whoever writes a provider or wants to know that one keeps its word.
A provider's tests are a `World` (the platform, faked at the wire, or the true one) and a subclass of the suite::

    # tests/test_myprovider.py
    import pytest
    from cloudtrain.testing.contract import ProviderContract
    from mypackage.testing import MyWorld


    class TestMyProvider(ProviderContract):
        @pytest.fixture(scope="class")
        @classmethod
        def world(cls, tmp_path_factory):
            with MyWorld(tmp_path_factory.mktemp("world")) as world:
                yield world

* `cloudtrain.testing.platform`: what a World must give, and why it is so little.
* `cloudtrain.testing.tables`: every field of a Job, with a change of it and where that change must show.
* `cloudtrain.testing.contract`: the suite, made of its quick half in `planning` and the half that runs jobs in
  `running`. These three, `plugin` and `network` import pytest, nothing else here does.
* `cloudtrain.testing.probe`: the script that the suite submits; it writes down what it sees.
* ``python -m cloudtrain.testing.matrix``: what every provider does with every field, as a page.

No test can be dropped or replaced by a subclass; one that a platform cannot pass is named in ``xfails`` with the
reason, and must then really fail. Slow tests, those that run jobs, are marked ``slow``.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # a failed assert of the suite then shows both sides, as in a test file
    for _name in ("contract", "planning", "running"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{_name}")
