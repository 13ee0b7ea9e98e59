"""The four processes of RadixFleet, one package each; they never import each other."""
