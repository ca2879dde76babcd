"""A process for the tests of `client.processes`: it ignores SIGTERM and has a child that does too.

    python -m tests.client.stubborn_daemon FILE      writes both pids to FILE when it is set up
"""

import os
import signal
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child:
    part = Path(f"{sys.argv[1]}.part")
    part.write_text(f"{os.getpid()} {child}")
    part.rename(sys.argv[1])
while True:
    time.sleep(1)
