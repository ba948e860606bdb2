"""The engine that runs nodes as operating-system processes, which exchange messages over TCP.

This package may import what `engines` may, and `engines`, `mailbox`, `message_budget` and `runtime`. The coordinator's
process never imports torch: only the zygote and its children may import the node process, the runtime and `Setup`.

launch.py                starts a run: keys, agent, coordinator; interrupts.py handles signals of the user
coordinator.py           follows a run; made of the parts below
  agent.py               the processes of one machine: zygote_process.py, namespaces.py, capacity.py
  control_server.py      the coordinator's socket: decodes messages and checks who may send them
  node_registry.py       the lifecycle of every node
  node_starter.py        starts and restarts nodes; start_monitor.py finds nodes that do not start
  node_commands.py       commands to nodes while they run
  liveness.py            ends nodes that hang, send no heartbeats or do not finish; watch_clock.py is its clock
  scheduled_events.py    timed faults and availability
  average_evaluations.py evaluates averaged models
  run_times.py           the run's clock, and the times of the startup
zygote.py                imports, loads and warms up once, then forks nodes
zygote_process.py        the zygote as its agent sees it; child_process.py, interpreter.py
zygote_template.py       forks zygotes, if a process makes many runs; template_process.py decides when
node_process.py          the process of one node: reports errors, handles the coordinator's messages
  coordinator_link.py    its connection to the coordinator
  node_network.py        its connections to peers
  node_run.py            its part in a run: node_observer.py, deferred_evaluations.py
  runtime.py             its clock, messages and training thread; slots.py limits trainings at the same time
  task_scope.py          its background tasks: they end with it, and their errors are reported
network_process.py       the network model in real time
transport.py             TCP over ZeroMQ between nodes; sealing.py and keys.py encrypt it
shaper.py, delay.py      delay messages as the network model requires; timed_queue.py releases them in time
control.py               the messages between coordinator, agents and nodes
"""
