"""Work as steps that stand as long as nothing has changed of which they were made.

`step` says what a step is made of, `digests` what a file or a folder holds, `journal` what earlier walks left, and
`walk` goes through the steps and runs those that do not stand. What a step does is nobody's business here.
"""
