"""The runtime: everything that talks over torch.distributed. It carries out programs and decides nothing."""
