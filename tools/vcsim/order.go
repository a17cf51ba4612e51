package main

import (
	"bytes"
	stdxml "encoding/xml"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/vmware/govmomi/simulator"
	"github.com/vmware/govmomi/vim25/types"
	"github.com/vmware/govmomi/vim25/xml"
)

// node is an XML element.
type node struct {
	name     string
	children []*node
	text     string
}

// outOfOrder names the first element of a SOAP request that govmomi's types do not have at that place. The order of their fields is
// that of the WSDL, in which a real vCenter wants the elements; the simulator reads them in any order, and drops unknown ones.
func outOfOrder(request []byte) error {
	method, err := simulator.UnmarshalBody(typeOf, request)
	if err != nil {
		return err
	}
	encoded, err := xml.Marshal(method.Body)
	if err != nil {
		return err
	}
	sent, err := parse(request, method.Name)
	if err != nil {
		return err
	}
	expected, err := parse(encoded, "")
	if err != nil {
		return err
	}
	return compare(method.Name, sent, expected)
}

// typeOf finds the types of vim25 and, by their bare names, those of storage policies.
func typeOf(name string) (reflect.Type, bool) {
	kinds := types.TypeFunc()
	if kind, ok := kinds(name); ok {
		return kind, true
	}
	return kinds("pbm:" + name)
}

// compare wants the same children in the same order. Go leaves some elements without a value out and always writes others, so those
// count for neither side.
func compare(path string, sent, expected *node) error {
	at := 0
	for _, child := range sent.children {
		next := at
		for next < len(expected.children) && expected.children[next].name != child.name && expected.children[next].isZero() {
			next++
		}
		if next == len(expected.children) || expected.children[next].name != child.name {
			if child.isZero() {
				continue
			}
			return fmt.Errorf("%s/%s is unknown or in the wrong place: want %s", path, child.name, names(expected))
		}
		if err := compare(path+"/"+child.name, child, expected.children[next]); err != nil {
			return err
		}
		at = next + 1
	}
	return nil
}

func (n *node) isZero() bool {
	text := strings.TrimSpace(n.text)
	for _, child := range n.children {
		if !child.isZero() {
			return false
		}
	}
	return text == "" || text == "0" || text == "false"
}

func names(n *node) string {
	var all []string
	for _, child := range n.children {
		all = append(all, child.name)
	}
	return strings.Join(all, " ")
}

// parse reads the first element of a name, or the first of all for an empty name.
func parse(data []byte, name string) (*node, error) {
	decoder := stdxml.NewDecoder(bytes.NewReader(data))
	var stack []*node
	for {
		token, err := decoder.Token()
		if err == io.EOF {
			return nil, fmt.Errorf("no element %q", name)
		}
		if err != nil {
			return nil, err
		}
		switch token := token.(type) {
		case stdxml.StartElement:
			if len(stack) == 0 && name != "" && token.Name.Local != name {
				continue
			}
			child := &node{name: token.Name.Local}
			if len(stack) > 0 {
				parent := stack[len(stack)-1]
				parent.children = append(parent.children, child)
			}
			stack = append(stack, child)
		case stdxml.CharData:
			if len(stack) > 0 {
				stack[len(stack)-1].text += string(token)
			}
		case stdxml.EndElement:
			if len(stack) == 0 {
				continue
			}
			last := stack[len(stack)-1]
			stack = stack[:len(stack)-1]
			if len(stack) == 0 {
				return last, nil
			}
		}
	}
}
