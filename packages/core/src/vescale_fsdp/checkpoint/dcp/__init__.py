"""The format of `torch.distributed.checkpoint`: `import_dcp` and `export_dcp`."""
