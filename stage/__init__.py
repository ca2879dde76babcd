"""The stage daemon: serves a range of a model's layers on one device."""
