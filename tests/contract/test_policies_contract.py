"""The policy contract, over every policy."""

from __future__ import annotations

import pytest

from kvkeep.policy.names import POLICIES
from kvkeep.testing.policies import PolicyContract


class TestEveryPolicy(PolicyContract):
    @pytest.fixture(params=sorted(POLICIES))
    def make_policy(self, request):
        return POLICIES[request.param]
