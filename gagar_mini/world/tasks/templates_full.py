"""The richer templates of the `full` level."""

from gagar_mini.world.tasks.templates import Template

FULL_TEMPLATES: tuple[Template, ...] = ()
