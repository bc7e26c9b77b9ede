"""How clients' bytes are parsed: few at once, others in a thread, many in a process before."""
