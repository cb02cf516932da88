import pytest


@pytest.fixture(autouse=True)
def _leave_nothing_behind(kv_leaks):
    """Every test of this project is checked for leaks."""
