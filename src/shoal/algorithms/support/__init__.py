"""Building blocks of algorithms: exchanges with retries, servers, send queues, fragments, requirements.

What several algorithms need, or what would hide the update rule in an algorithm's file, belongs here. The package
may import what `shoal.algorithms` may.
"""
