"""Nodes as operating-system processes that talk TCP.

supervisor.py    starts, watches, collects and ends everything; never imports torch
zygote.py        imports, loads and warms up once, then forks nodes
node_process.py  the life of a forked node: an event loop, a training thread, a transport
transport.py     TCP over ZeroMQ between nodes
control.py       what supervisor, zygote and nodes say to each other
"""
