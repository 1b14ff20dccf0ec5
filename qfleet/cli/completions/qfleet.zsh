#compdef qfleet
# Completion of qfleet for zsh: eval "$(qfleet completion zsh)" after compinit, or save it as _qfleet in a folder of
# $fpath
_qfleet() {
    local line word
    local -a whole whole_text begun
    for line in "${(@f)$("${words[1]}" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        word=${line%%$'\t'*}
        [[ -z $word ]] && continue
        if [[ $word == *[=.] ]]; then
            begun+=("$word")
        else
            whole+=("$word")
            if [[ $line == *$'\t'* ]]; then
                whole_text+=("$word  ${line#*$'\t'}")
            else
                whole_text+=("$word")
            fi
        fi
    done
    if (( ! ${#whole} && ! ${#begun} )); then
        _files
        return
    fi
    (( ${#whole} )) && compadd -l -d whole_text -a whole
    (( ${#begun} )) && compadd -S '' -a begun
}
if [[ $funcstack[1] == _qfleet ]]; then
    _qfleet "$@"
else
    compdef _qfleet qfleet
fi
