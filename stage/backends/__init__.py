"""How layers are computed: one interface (`base.py`) and one package a backend."""
