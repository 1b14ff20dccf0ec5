"""Network modules: encoders, torsos, heads, recurrent cores."""
