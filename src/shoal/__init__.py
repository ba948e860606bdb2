"""Shoal: decentralized learning. An algorithm is written once and runs in simulation and as real processes."""
