"""Modules in memory: edits that a module's shape suggests, and the whole before against after."""
