# Completion of qfleet for bash: eval "$(qfleet completion bash)", or save it as
# ~/.local/share/bash-completion/completions/qfleet
_qfleet() {
    local line word
    COMPREPLY=()
    while IFS= read -r line; do
        word=${line%%$'\t'*}
        [[ -n $word ]] && COMPREPLY+=("$word")
    done < <("${COMP_WORDS[0]/#\~/$HOME}" __complete --line "${COMP_LINE:0:COMP_POINT}" \
        --breaks "$COMP_WORDBREAKS" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then
        compopt -o nospace 2>/dev/null
    fi
}
complete -o bashdefault -o default -F _qfleet qfleet
