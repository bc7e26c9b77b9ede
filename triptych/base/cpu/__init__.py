"""How the processes of one machine share its CPU cores."""
