"""The stage daemon: serves a range of a model's layers on one device."""

import os

# Before torch is imported: computing threads that have nothing to do sleep. By default they spin, which takes
# the cores from the other stages of the machine (measured: two on two cores prefill 4 times slower).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
