"""What a layout costs before anything is launched: memory of the fullest GPU, messages, time, and the best layouts.

`stages`, `states`, `activations`, `buffers` and `schedule` add up in `memory`; `communication` and `hardware` in
`duration`; `search` ranks layouts and `plan_report` prints them. Nothing here needs a GPU or a process group.
"""
