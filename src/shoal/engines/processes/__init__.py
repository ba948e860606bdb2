"""Nodes as operating-system processes that talk TCP.

supervisor.py    starts, watches, collects and ends everything; never imports torch
zygote.py        imports, loads and warms up once, then forks nodes
node_process.py  the life of a forked node: an event loop, a training thread, a transport
transport.py     TCP over ZeroMQ between nodes
namespaces.py    a network of its own for each node, where the kernel shapes messages
delay.py         what of a network the kernel does not do
control.py       what supervisor, zygote and nodes say to each other
"""
