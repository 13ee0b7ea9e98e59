"""Scripts: a chain of generations, constants and selects as one request. Leaves programs to whoever wrote them."""
