"""One thread, and attempts at a stage that share a store."""

import pytest
import torch
from small_runs import make_attempt
from stage_server import stage_server


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def attempt(tmp_path):
    """Make attempts at a stage that share one store: attempt(config, inputs, key=..., stop=...)."""
    count = 0

    def make(config, inputs, **more):
        nonlocal count
        count += 1
        return make_attempt(tmp_path / f"attempt-{count}", tmp_path / "store", config, inputs, **more)

    return make


@pytest.fixture(scope="session")
def stages(tmp_path_factory):
    """A fork server for stages of several ranks."""
    with stage_server(tmp_path_factory.mktemp("stages")) as server:
        yield server
