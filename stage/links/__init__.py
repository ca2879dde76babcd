"""How frames get from one stage to the next: one interface (`base.py`), one file a carrier."""
