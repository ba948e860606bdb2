"""The commands: one module per group, with their arguments (`add_parser`) and what they do.

The package may import every other package. It imports engines, data and plots only when a command needs them.
"""
