"""Test support: a kit for code that submits jobs, and the contract suite of providers.

The kit is a plugin of pytest that comes with the package (docs/testing.md):

* `cloudtrain.testing.plugin`: its fixtures ``fake_cloud``, ``cloudtrain_store``, ``cloudtrain_snapshot`` and
  ``cloudtrain_offline``.
* `cloudtrain.testing.fake_cloud`: the fake platform; `script` and `local_job` are its jobs.
* `cloudtrain.testing.places`, `memory`: stores and settings; `network`: block all but this machine.
* `cloudtrain.testing.requests`: assertions on a planned request, golden files of plans.

The contract suite checks a provider. A provider's tests are a `FakePlatform` (the platform, faked at the wire, or the
real one) and a subclass of the suite::

    # tests/test_myprovider.py
    import pytest
    from cloudtrain.testing.contract import ProviderContract
    from mypackage.testing import MyPlatform


    class TestMyProvider(ProviderContract):
        @pytest.fixture(scope="class")
        @classmethod
        def world(cls, tmp_path_factory):
            with MyPlatform(tmp_path_factory.mktemp("world")) as world:
                yield world

* `cloudtrain.testing.platform`: the methods of a FakePlatform.
* `cloudtrain.testing.tables`: every field of a Job, with a change of it and the place where that change must show.
* `cloudtrain.testing.contract`: the suite, made of its quick half in `planning` and the half that runs jobs in
  `running`. Only these three, `plugin` and `network` import pytest.
* `cloudtrain.testing.probe`: the script that the suite submits; it records its view.

A subclass cannot drop or replace a test. If a platform cannot pass a test, ``xfails`` names it with the reason, and
the test must then fail. Tests that run jobs are marked ``slow``.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # a failed assert of the suite then shows both sides, as in a test file
    for _name in ("contract", "planning", "running"):
        sys.modules["pytest"].register_assert_rewrite(f"{__name__}.{_name}")
