"""Our own format: `save`, `load`, `latest`, `verify`; and the stage on which exports are made."""
