"""What Prometheus scrapes from a running coordinator: its own counters, and its stages' figures."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path

from tests.e2e.daemons import Mesh
from tests.gguf_files import write_tiny_llama


def test_a_scrape_tells_of_requests_and_stages(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny.gguf", layers=2)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"

    def scrape() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
            return str(response.read().decode())

    with Mesh(tmp_path, model, 1, "--metrics-listen", address) as mesh:
        with mesh.client.generate([1, 2, 3], max_tokens=5, ignore_eos=True) as events:
            list(events)
        assert "pipellm_tokens_generated_total 5.0" in scrape() and "pipellm_stages 1.0" in scrape()
        mesh.wait(
            lambda: 'pipellm_stage_weight_bytes{stage="s0"} 0.0' not in scrape(), "a status with weights"
        )
        mesh.wait(lambda: 'pipellm_stage_weight_bytes{stage="s0"}' in scrape(), "a stage's figures")
        assert "pipellm_stage_gpu_power_watts{" not in scrape()  # a stage on a CPU
        mesh.stages["s0"].stop()
        mesh.wait(lambda: 'stage="s0"' not in scrape(), "the figures of a stage that left to go")
