"""Where rows live when no batch uses them: the store protocol and its stores."""
