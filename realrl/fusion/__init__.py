"""The search for fused pipeline schedules on this machine's cores, and pages that show them.

instance ──► search ──► schedule, bound, front ──► page
               │ helpers, one a core
               └─► realrl.plan.fusion (rules, annealing) with compiled inner loops
"""
